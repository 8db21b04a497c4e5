-- Tells the gateways with a lease on an instance that its room is wanted, so that they keep none unused.
--
-- KEYS: leader
-- ARGV: prefix token instance
-- Returns: 1, or {STALE_LEADER}
-- Emits: inboxes: wanted
-- @include fence
-- @include tell
-- @include tell_lease_holders
tell_lease_holders(instance, 'type', 'wanted', 'instance', instance)
return 1
