-- Decides that an instance stops. Refused while anybody holds a lease: a running answer is never cut.
--
-- KEYS: leader instance_key leases_key events
-- ARGV: prefix token instance end_class status
-- Returns: 0 when it is STOPPING from now on, else how many leases are held,
--   or {STALE_LEADER}, {UNKNOWN_INSTANCE}, {WRONG_STATE, state}
-- Emits: status
-- @include fence
-- @include emit
-- @include set_state
local state = redis.call('HGET', instance_key, 'state')
if not state then
  return { UNKNOWN_INSTANCE }
end
if state ~= 'ready' and state ~= 'draining' and state ~= 'sleeping' then
  return { WRONG_STATE, state }
end
local held = redis.call('HLEN', leases_key)
if held > 0 then
  return held
end
redis.call('HSET', instance_key, 'end_class', end_class)
set_state(instance, 'stopping', status, { end_class = end_class })
return 0
