-- Shows the devices of a host and what each model holds of them, in place of what was shown before.
--
-- KEYS: leader devices_key
-- ARGV: prefix token host accounts held
--   accounts: JSON object, device -> JSON text; held: JSON object, device -> {model -> bytes}
-- Returns: 1, or {STALE_LEADER}
-- Emits: nothing
-- @include fence
-- @include write
for _, device in ipairs(redis.call('HKEYS', devices_key)) do
  redis.call('DEL', prefix .. 'held:' .. host .. ':' .. device)
end
redis.call('DEL', devices_key)
write(devices_key, cjson.decode(accounts))
for device, models in pairs(cjson.decode(held)) do
  write(prefix .. 'held:' .. host .. ':' .. device, models)
end
return 1
