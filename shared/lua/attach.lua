-- A conversation that waited has its instance: from here on its answer can be read there, and it holds a claim of its
-- own beside its gateway's lease, so that it outlives that gateway.
--
-- KEYS: conversation leases_key instance_key
-- ARGV: prefix name ticket instance lead
--   lead is how many bytes of comments its client gets before those of the engine
-- Returns: 1, or 0 when it is over: stopped, or another one took its name. One that Redis forgot is answered as one
--   that nobody can come back to: 1, and nothing is kept of it
-- Emits: nothing
if not redis.call('HGET', conversation, 'ticket') then
  return 1
end
-- A grant that comes late must not bring a stopped conversation back. Streaming it is where an earlier call's answer
-- was lost.
local held, state = unpack(redis.call('HMGET', conversation, 'ticket', 'state'))
if held ~= ticket or (state ~= 'queued' and state ~= 'streaming') then
  return 0
end
redis.call('HSET', conversation, 'state', 'streaming', 'instance', instance, 'lead', lead)
-- An instance that ended meanwhile took its leases along: a claim on it would be nobody's to end.
if redis.call('EXISTS', instance_key) == 0 then
  return 1
end
-- No gateway's heartbeat renews it: the supervisor ends it, if its gateway does not.
redis.call('HSET', leases_key, 'conversation:' .. name, ticket .. ':0')
return 1
