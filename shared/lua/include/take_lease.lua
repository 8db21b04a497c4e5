-- Requires: prefix, commands; lease_value, ask. Takes a gateway's lease away if it is the given one; the instance's
-- last one tells the supervisor, with the time of last use. Returns whether it was.
local function take_lease(instance, gateway, lease)
  local leases_of_instance = prefix .. 'leases:' .. instance
  if lease_id(redis.call('HGET', leases_of_instance, gateway)) ~= lease then
    return false
  end
  redis.call('HDEL', leases_of_instance, gateway)
  if redis.call('EXISTS', leases_of_instance) == 0 then
    local last_used_ms = redis.call('HGET', prefix .. 'instance:' .. instance, 'last_used_ms')
    ask('verb', 'idle', 'instance', instance, 'last_used_ms', last_used_ms or 0)
  end
  return true
end
