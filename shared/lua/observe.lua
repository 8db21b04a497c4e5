-- What the scheduler decides on, as of one instant.
--
-- KEYS: leader queue instances gateways
-- ARGV: prefix token
-- Returns: {now (ms), queue as in read_queue, {{instance, last used (ms) or 0, {gateway, lease value, …}}, …},
--   {gateway, beat, …}}, or {STALE_LEADER}
-- Emits: nothing
-- @include fence
-- @include now_ms
-- @include queue_facts
local claims = {}
for _, instance in ipairs(redis.call('ZRANGE', instances, 0, -1)) do
  claims[#claims + 1] = {
    instance,
    redis.call('HGET', prefix .. 'instance:' .. instance, 'last_used_ms') or 0,
    redis.call('HGETALL', prefix .. 'leases:' .. instance),
  }
end
return { now_ms, queue_facts(), claims, redis.call('ZRANGE', gateways, 0, -1, 'WITHSCORES') }
