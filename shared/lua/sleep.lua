-- Notes that an instance gave its memory back, or that one that was to wake sleeps on. Refused while anybody holds
-- a lease, who would wake it at once.
--
-- KEYS: leader instance_key leases_key events
-- ARGV: prefix token instance status
-- Returns: 1, 0 while there is a lease, or {STALE_LEADER}, {UNKNOWN_INSTANCE}, {WRONG_STATE, state}
-- Emits: status
-- @include fence
-- @include emit
-- @include set_state
local state = redis.call('HGET', instance_key, 'state')
if not state then
  return { UNKNOWN_INSTANCE }
end
if state ~= 'ready' and state ~= 'waking' and state ~= 'sleeping' then
  return { WRONG_STATE, state }
end
if redis.call('EXISTS', leases_key) == 1 then
  return 0
end
set_state(instance, 'sleeping', status)
return 1
