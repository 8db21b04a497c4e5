-- Requires: prefix, commands; tell, take_lease. Ends what a conversation holds: its wait in a gateway's queue, or its
-- claim on an instance. Returns its state and its instance, empty for a conversation that does not exist.
local function let_go(conversation, name)
  local state, ticket, gateway, instance =
    unpack(redis.call('HMGET', conversation, 'state', 'ticket', 'gateway', 'instance'))
  if state == 'queued' then
    tell(gateway, 'type', 'conversation_over', 'ticket', ticket)
  elseif state == 'streaming' or state == 'detached' then
    take_lease(instance, 'conversation:' .. name, ticket)
  end
  return state or '', instance or ''
end
