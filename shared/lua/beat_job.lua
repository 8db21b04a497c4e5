-- Notes that an attempt at a job gets on: its stall limit begins anew.
--
-- KEYS: job_key
-- ARGV: prefix attempt progress ttl_ms
--   progress: text for people, empty for none
-- Returns: 1, 2 if it is to end because nobody wants it any more, 0 if the job is no longer this attempt's
-- Emits: nothing
-- @include now_ms
local facts = redis.call('HMGET', job_key, 'state', 'attempt', 'cancelled')
if facts[1] ~= 'running' or facts[2] ~= attempt then
  return 0
end
redis.call('HSET', job_key, 'changed_ms', now_ms)
if progress ~= '' then
  redis.call('HSET', job_key, 'progress', progress)
end
redis.call('PEXPIRE', job_key, ttl_ms)
return facts[3] and 2 or 1
