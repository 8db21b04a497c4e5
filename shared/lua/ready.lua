-- Makes an instance READY. Whoever waits for its model holds a lease before anybody can see it ready, so that it
-- can't be stopped between its load and the requests that the load was for.
--
-- KEYS: leader instance_key model_key gateways queue events
-- ARGV: prefix token instance model fields model_fields status
--   fields, model_fields: JSON objects
-- Returns: how many tickets were granted, or {STALE_LEADER}, {UNKNOWN_INSTANCE}, {WRONG_STATE, state}
-- Emits: status; inboxes: granted
-- @include fence
-- @include now_ms
-- @include write
-- @include emit
-- @include tell
-- @include set_state
-- @include waiting
-- @include by_gateway
-- @include grant
local state = redis.call('HGET', instance_key, 'state')
if not state then
  return { UNKNOWN_INSTANCE }
end
if state == 'draining' or state == 'stopping' or state == 'stop_failed' then
  return { WRONG_STATE, state }
end
write(instance_key, cjson.decode(fields))
redis.call('HSET', instance_key, 'last_used_ms', now_ms)
if redis.call('HGET', model_key, 'instance') == instance then
  write(model_key, cjson.decode(model_fields))
  redis.call('HSET', model_key, 'last_used_ms', now_ms)
  if state == 'starting' or state == 'loading' then
    redis.call('HINCRBY', model_key, 'loads', 1)
  end
end
set_state(instance, 'ready', status)
return grant(instance, model)
