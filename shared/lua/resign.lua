-- Gives the leadership up.
--
-- KEYS: leader
-- ARGV: prefix token
-- Returns: 1, or {STALE_LEADER}
-- Emits: nothing
-- @include fence
redis.call('DEL', leader)
return 1
