-- Forgets a download: it is done, has failed or was called off.
--
-- KEYS: leader download_key downloads events
-- ARGV: prefix token name event
--   event: JSON object; one without `kind` is not emitted
-- Returns: 1, 0 when there was none, or {STALE_LEADER}
-- Emits: the given event
-- @include fence
-- @include emit
-- @include emit_given
redis.call('ZREM', downloads, name)
local found = redis.call('DEL', download_key)
if found == 1 then
  emit_given(event)
end
return found
