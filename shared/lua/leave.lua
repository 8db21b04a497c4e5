-- A gateway unregisters itself.
--
-- KEYS: gateways queue instances commands
-- ARGV: prefix gateway
-- Returns: 1
-- Emits: nothing; commands: left, idle
-- @include lease_value
-- @include ask
-- @include take_ticket
-- @include take_lease
-- @include forget_gateway
forget_gateway(gateway)
return 1
