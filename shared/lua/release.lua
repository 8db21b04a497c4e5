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
local model = redis.call('HGET', instance_key, 'model')
if used == '1' and model then
  redis.call('HSET', instance_key, 'last_used_ms', now_ms)
  if redis.call('EXISTS', prefix .. 'model:' .. model) == 1 then -- a single field would look like a whole record
    redis.call('HSET', prefix .. 'model:' .. model, 'last_used_ms', now_ms)
  end
end
take_lease(instance, gateway, lease)
return 1
