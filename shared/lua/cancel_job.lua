-- Calls a job off: a queued one vanishes, a running one is told with its next sign of life.
--
-- KEYS: job_key jobs
-- ARGV: prefix job
-- Returns: 1 if it was queued, 2 if it runs, 0 if it is over
-- Emits: nothing
-- Emits: nothing
local state = redis.call('HGET', job_key, 'state')
if state == 'queued' then
  redis.call('DEL', job_key)
  redis.call('ZREM', jobs, job)
  return 1
end
if state == 'running' then
  redis.call('HSET', job_key, 'cancelled', 1)
  return 2
end
return 0
