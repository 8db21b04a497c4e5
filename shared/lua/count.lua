-- Adds to a model's totals what its instance has done since it was counted last, and notes what it does now.
-- An instance that says less than before has begun anew.
--
-- KEYS: leader model_key
-- ARGV: prefix token instance counters gauges
--   counters, gauges: JSON objects, name → number; counters as the instance says them, since its start
-- Returns: 1, or {STALE_LEADER}, {UNKNOWN_MODEL}
-- Emits: nothing
-- @include fence
-- @include write
if redis.call('EXISTS', model_key) == 0 then
  return { UNKNOWN_MODEL }
end
local same = redis.call('HGET', model_key, 'counted_of') == instance
local before = same and cjson.decode(redis.call('HGET', model_key, 'counted') or '{}') or {}
for name, value in pairs(cjson.decode(counters)) do
  local more = value - (before[name] or 0)
  redis.call('HINCRBYFLOAT', model_key, name, more < 0 and value or more)
end
redis.call('HSET', model_key, 'counted_of', instance, 'counted', counters)
write(model_key, cjson.decode(gauges))
return 1
