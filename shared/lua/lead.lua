-- Takes the leadership, if nobody has it. The lock never exists without a TTL.
--
-- KEYS: leader leadership
-- ARGV: prefix token number ttl_ms info
--   info: JSON object
-- Returns: 1, or 0 when another leads or the number is not above the last one
-- Emits: nothing
-- @include now_ms
-- @include write
local last = redis.call('HGET', leadership, 'number')
if last and tonumber(number) <= tonumber(last) then
  return 0
end
if not redis.call('SET', leader, token, 'NX', 'PX', ttl_ms) then
  return 0
end
redis.call('DEL', leadership)
redis.call('HSET', leadership, 'number', number, 'started_ms', now_ms, 'heartbeat_ms', now_ms)
write(leadership, cjson.decode(info))
return 1
