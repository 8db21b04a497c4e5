-- Opens a job: a record says what is to be done, by whom it is, and how far it has come. One that is queued or
-- running already is left as it is, and wanted again if it was called off. Attempts are counted on from those at the
-- same job that ended: who made one of them may still have a word to say of it, and must not be taken for the next.
--
-- KEYS: job_key jobs
-- ARGV: prefix job fields ttl_ms
--   fields: JSON object
-- Returns: 1, or 0 where it is under way
-- Emits: nothing
-- @include now_ms
-- @include write
local state, attempt = unpack(redis.call('HMGET', job_key, 'state', 'attempt'))
if state == 'queued' or state == 'running' then
  redis.call('HDEL', job_key, 'cancelled')
  return 0
end
redis.call('DEL', job_key)
write(job_key, cjson.decode(fields))
redis.call('HSET', job_key, 'state', 'queued', 'asked_ms', now_ms, 'changed_ms', now_ms,
  'attempt', attempt or 0, 'lost', 0)
redis.call('PEXPIRE', job_key, ttl_ms)
redis.call('ZADD', jobs, now_ms, job)
return 1
