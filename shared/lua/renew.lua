-- Keeps the leadership.
--
-- KEYS: leader leadership
-- ARGV: prefix token ttl_ms info
--   info: JSON object
-- Returns: 1, or {STALE_LEADER}
-- Emits: nothing
-- @include fence
-- @include now_ms
-- @include write
redis.call('PEXPIRE', leader, ttl_ms)
redis.call('HSET', leadership, 'heartbeat_ms', now_ms)
write(leadership, cjson.decode(info))
return 1
