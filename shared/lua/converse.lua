-- Begins a conversation; an older one of the same name ends, whatever it is doing.
--
-- KEYS: conversation commands
-- ARGV: prefix name ticket gateway model request_id keep_ms
--   ticket is the conversation's own, and tells it from others of its name
-- Returns: {state, instance} of the older one, empty where there was none
-- Emits: nothing; commands: idle (the instance's last claim); inboxes: conversation_over (it waited in a queue)
-- @include lease_value
-- @include ask
-- @include tell
-- @include take_lease
-- @include let_go
local state, instance = let_go(conversation, name)
redis.call('DEL', conversation)
redis.call('HSET', conversation, 'state', 'queued', 'ticket', ticket, 'gateway', gateway, 'model', model,
  'request_id', request_id)
redis.call('PEXPIRE', conversation, keep_ms)
return { state, instance }
