-- Closes a READY instance to new leases; those that it has go on.
--
-- KEYS: leader instance_key events
-- ARGV: prefix token instance status
-- Returns: 1, 0 when it is in another state, or {STALE_LEADER}, {UNKNOWN_INSTANCE}
-- Emits: status; inboxes: draining
-- @include fence
-- @include emit
-- @include tell
-- @include tell_lease_holders
-- @include set_state
local state = redis.call('HGET', instance_key, 'state')
if not state then
  return { UNKNOWN_INSTANCE }
end
if state ~= 'ready' then
  return 0
end
set_state(instance, 'draining', status)
tell_lease_holders(instance, 'type', 'draining', 'instance', instance)
return 1
