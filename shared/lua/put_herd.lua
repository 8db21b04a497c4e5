-- Writes facts of the herd.
--
-- KEYS: leader herd
-- ARGV: prefix token fields
--   fields: JSON object
-- Returns: 1, or {STALE_LEADER}
-- Emits: nothing
-- @include fence
-- @include write
if redis.call('EXISTS', herd) == 1 then -- its existence alone says that the herd is open
  write(herd, cjson.decode(fields))
end
return 1
