-- Is done with commands that take no answer.
--
-- KEYS: leader commands
-- ARGV: prefix token ids
--   ids: JSON list of command ids
-- Returns: 1, or {STALE_LEADER}
-- Emits: nothing
-- @include fence
for _, id in ipairs(cjson.decode(ids)) do
  redis.call('XACK', commands, 'supervisor', id)
  redis.call('XDEL', commands, id)
end
return 1
