-- Answers a command, once: a second answer finds the command gone and says nothing.
--
-- KEYS: leader commands
-- ARGV: prefix token command gateway payload
--   payload: JSON object, passed on
-- Returns: 1, 0 when it was answered before, or {STALE_LEADER}
-- Emits: nothing; inboxes: answer
-- @include fence
-- @include tell
redis.call('XACK', commands, 'supervisor', command)
if redis.call('XDEL', commands, command) == 0 then
  return 0
end
tell(gateway, 'type', 'answer', 'command', command, 'payload', payload)
return 1
