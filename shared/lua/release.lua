-- Gives a lease back, if it is the one that is booked: a release that comes late or twice changes nothing.
--
-- KEYS: leases_key instance_key commands
-- ARGV: prefix instance gateway lease used
--   used: 1 when inference ran under it, else 0
-- Returns: 1 when it was booked, else 0
-- Emits: nothing; commands: idle (the instance's last lease)
-- @include now_ms
-- @include lease_value
-- @include ask
-- @include take_lease
if lease_id(redis.call('HGET', leases_key, gateway)) ~= lease then
  return 0
end
if used == '1' then
  redis.call('HSET', instance_key, 'last_used_ms', now_ms)
  redis.call('HSET', prefix .. 'model:' .. redis.call('HGET', instance_key, 'model'), 'last_used_ms', now_ms)
end
take_lease(instance, gateway, lease)
return 1
