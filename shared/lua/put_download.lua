-- Begins a download or writes fields of it.
--
-- KEYS: leader download_key downloads events
-- ARGV: prefix token name fields event
--   fields, event: JSON objects; an event without `kind` is not emitted
-- Returns: 1, or {STALE_LEADER}
-- Emits: the given event
-- @include fence
-- @include now_ms
-- @include write
-- @include emit
-- @include emit_given
redis.call('ZADD', downloads, 'NX', now_ms, name)
redis.call('HSET', download_key, 'name', name)
write(download_key, cjson.decode(fields))
emit_given(event)
return 1
