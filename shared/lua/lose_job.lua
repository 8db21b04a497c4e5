-- Takes a job from an attempt that will not end it, since its worker is gone or gives it back. It is queued again,
-- or failed once too many of its workers died.
--
-- KEYS: job_key jobs
-- ARGV: prefix job attempt given_back most_lost ttl_ms
--   given_back: 1 if the worker itself gives it back, which counts against nobody
-- Returns: 1 if it is queued again, 2 if it is over for good, 0 if its worker lives or the attempt does not have it
-- Emits: nothing
-- @include now_ms
local facts = redis.call('HMGET', job_key, 'state', 'attempt', 'worker', 'cancelled')
if facts[1] ~= 'running' or facts[2] ~= attempt then
  return 0
end
if given_back ~= '1' and redis.call('EXISTS', prefix .. 'worker:' .. facts[3]) == 1 then
  return 0
end
if facts[4] then
  redis.call('DEL', job_key)
  redis.call('ZREM', jobs, job)
  return 2
end
if given_back ~= '1' then
  if redis.call('HINCRBY', job_key, 'lost', 1) >= tonumber(most_lost) then
    redis.call('HSET', job_key, 'state', 'failed', 'ended_ms', now_ms, 'changed_ms', now_ms,
      'error', 'its worker died ' .. most_lost .. ' times')
    redis.call('PEXPIRE', job_key, ttl_ms)
    redis.call('ZREM', jobs, job)
    return 2
  end
end
redis.call('HSET', job_key, 'state', 'queued', 'changed_ms', now_ms)
redis.call('HDEL', job_key, 'worker')
return 1
