-- Closes a job as done or failed, if this attempt still has it.
--
-- KEYS: job_key jobs
-- ARGV: prefix job attempt error ttl_ms
--   error: why it failed, empty for done
-- Returns: 1, or 0 if the job is no longer this attempt's
-- Emits: nothing
-- @include now_ms
local facts = redis.call('HMGET', job_key, 'state', 'attempt')
if facts[1] ~= 'running' or facts[2] ~= attempt then
  return 0
end
redis.call('HSET', job_key, 'state', error == '' and 'done' or 'failed', 'ended_ms', now_ms, 'changed_ms', now_ms)
if error ~= '' then
  redis.call('HSET', job_key, 'error', error)
end
redis.call('PEXPIRE', job_key, ttl_ms)
redis.call('ZREM', jobs, job)
return 1
