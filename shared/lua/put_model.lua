-- Writes fields of a model.
--
-- KEYS: leader model_key events
-- ARGV: prefix token fields event
--   fields, event: JSON objects; an event without `kind` is not emitted
-- Returns: 1, or {STALE_LEADER}, {UNKNOWN_MODEL}
-- Emits: the given event
-- @include fence
-- @include write
-- @include emit
-- @include emit_given
if redis.call('EXISTS', model_key) == 0 then
  return { UNKNOWN_MODEL }
end
write(model_key, cjson.decode(fields))
emit_given(event)
return 1
