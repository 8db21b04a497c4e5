-- Lets a worker begin a queued job. Whoever comes second, or comes for one that is over, gets nothing.
--
-- KEYS: job_key
-- ARGV: prefix worker ttl_ms
-- Returns: the number of this attempt, 0 for nothing to do
-- Emits: nothing
-- @include now_ms
if redis.call('HGET', job_key, 'state') ~= 'queued' then
  return 0
end
redis.call('HSET', job_key, 'state', 'running', 'worker', worker, 'started_ms', now_ms, 'changed_ms', now_ms)
redis.call('HDEL', job_key, 'error', 'progress')
redis.call('PEXPIRE', job_key, ttl_ms)
return redis.call('HINCRBY', job_key, 'attempt', 1)
