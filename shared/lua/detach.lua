-- A conversation goes on without its client, or has a new deadline: its claim on its instance lasts until then.
--
-- KEYS: conversation leases_key instance_key
-- ARGV: prefix name ticket instance limit_ms keep_ms
--   limit_ms is how long the claim lasts at most, keep_ms how much longer the record
-- Returns: 1, or 0 when it is over or its instance is gone
-- Emits: nothing
-- @include now_ms
local held, state = unpack(redis.call('HMGET', conversation, 'ticket', 'state'))
-- Queued it still is where Redis was away when it got its instance.
local goes_on = state == 'queued' or state == 'streaming' or state == 'detached'
if held ~= ticket or not goes_on or redis.call('EXISTS', instance_key) == 0 then
  return 0
end
redis.call('HSET', leases_key, 'conversation:' .. name, ticket .. ':0')
redis.call('HSET', conversation, 'state', 'detached', 'instance', instance, 'deadline_ms', now_ms + limit_ms)
redis.call('PEXPIRE', conversation, limit_ms + keep_ms)
return 1
