-- Lets the waiting requests through to a sleeping instance: the first of them wakes it.
--
-- KEYS: leader instance_key gateways queue events
-- ARGV: prefix token instance model status
-- Returns: how many tickets were granted, or {STALE_LEADER}, {UNKNOWN_INSTANCE}, {WRONG_STATE, state}
-- Emits: status; inboxes: granted
-- @include fence
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
if state ~= 'sleeping' then
  return { WRONG_STATE, state }
end
set_state(instance, 'waking', status)
return grant(instance, model)
