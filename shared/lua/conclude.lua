-- Ends a conversation: the engine is done with it, it was stopped, its time is over, or it is lost.
--
-- KEYS: conversation commands
-- ARGV: prefix name ticket state reason keep_ms
--   ticket may be empty, for whichever has the name now; keep_ms is how long its end can be asked for, 0 not at all
-- Returns: {state before, instance}, empty where there is none of this ticket
-- Emits: nothing; commands: idle (the instance's last claim); inboxes: conversation_over (it waited in a queue)
-- @include lease_value
-- @include ask
-- @include tell
-- @include take_lease
-- @include let_go
if ticket ~= '' and redis.call('HGET', conversation, 'ticket') ~= ticket then
  return { '', '' }
end
local before, instance = let_go(conversation, name)
if before == '' or keep_ms == '0' then
  redis.call('DEL', conversation)
elseif before == 'queued' or before == 'streaming' or before == 'detached' or state == 'stopped' then
  redis.call('HSET', conversation, 'state', state, 'reason', reason)
  redis.call('PEXPIRE', conversation, keep_ms)
end
return { before, instance }
