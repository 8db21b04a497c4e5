-- Says that the herd is there: from now on gateways are admitted.
--
-- KEYS: leader herd events
-- ARGV: prefix token fresh_incarnation fields
--   fields: JSON object
-- Returns: the incarnation, kept while Redis keeps its data, or {STALE_LEADER}
-- Emits: herd
-- @include fence
-- @include write
-- @include emit
redis.call('HSETNX', herd, 'incarnation', fresh_incarnation)
write(herd, cjson.decode(fields))
local incarnation = redis.call('HGET', herd, 'incarnation')
emit('herd', nil, 'incarnation', incarnation)
return incarnation
