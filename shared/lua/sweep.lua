-- The leader forgets a gateway that fell silent.
--
-- KEYS: leader gateways queue instances commands events
-- ARGV: prefix token gateway
-- Returns: 1, or {STALE_LEADER}
-- Emits: swept; commands: left, idle
-- @include fence
-- @include emit
-- @include lease_value
-- @include ask
-- @include take_ticket
-- @include take_lease
-- @include forget_gateway
forget_gateway(gateway)
emit('swept', nil, 'gateway', gateway)
return 1
