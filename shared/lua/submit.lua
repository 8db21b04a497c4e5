-- Asks something of the supervisor.
--
-- KEYS: herd commands
-- ARGV: prefix verb gateway deadline_ms fields
--   deadline_ms counts from now; fields: JSON object
-- Returns: the command's id, or {NO_HERD}
-- Emits: nothing; commands: the given verb
-- @include now_ms
-- @include ask
if redis.call('EXISTS', herd) == 0 then
  return { NO_HERD }
end
local entry = { 'verb', verb, 'gateway', gateway, 'deadline_ms', now_ms + deadline_ms }
for field, value in pairs(cjson.decode(fields)) do
  entry[#entry + 1] = field
  entry[#entry + 1] = value
end
return ask(unpack(entry))
