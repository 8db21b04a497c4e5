-- Tells the gateways that ask for something that it is being done: they go on waiting for the answer.
--
-- KEYS: leader
-- ARGV: prefix token orders
--   orders: JSON object, command id → gateway
-- Returns: 1, or {STALE_LEADER}
-- Emits: nothing; inboxes: at_work
-- @include fence
-- @include tell
for command, gateway in pairs(cjson.decode(orders)) do
  tell(gateway, 'type', 'at_work', 'command', command)
end
return 1
