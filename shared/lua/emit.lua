-- Appends to what happened.
--
-- KEYS: leader events
-- ARGV: prefix token event
--   event: JSON object with its `kind`
-- Returns: 1, or {STALE_LEADER}
-- Emits: the given event
-- @include fence
-- @include emit
-- @include emit_given
emit_given(event)
return 1
