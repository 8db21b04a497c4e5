-- Creates or updates an instance and its model.
--
-- KEYS: leader instances instance_key model_key events
-- ARGV: prefix token instance model fields model_fields state status event
--   fields, model_fields, event: JSON objects; an empty state leaves it; an event without `kind` is not emitted
-- Returns: 1, or {STALE_LEADER}
-- Emits: status (with a state), the given event
-- @include fence
-- @include now_ms
-- @include write
-- @include emit
-- @include emit_given
-- @include set_state
local is_new, is_listed = redis.call('EXISTS', instance_key) == 0, redis.call('EXISTS', model_key) == 1
if is_new then
  redis.call('HSET', instance_key, 'model', model, 'started_ms', now_ms, 'last_used_ms', 0, 'state_revision', 0)
end
redis.call('ZADD', instances, 'NX', now_ms, instance)
if not is_listed then
  redis.call('HSET', model_key, 'name', model, 'removed', '1') -- adopted, but no longer in the registry
end
if is_new or not is_listed then
  redis.call('HSET', model_key, 'instance', instance)
end
write(instance_key, cjson.decode(fields))
if redis.call('HGET', model_key, 'instance') == instance then
  write(model_key, cjson.decode(model_fields))
end
if state ~= '' then
  set_state(instance, state, status)
end
emit_given(event)
return 1
