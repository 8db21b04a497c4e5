-- Requires: prefix; tell. Sends a message to every gateway that holds a lease on an instance.
local function tell_lease_holders(instance, ...)
  for _, gateway in ipairs(redis.call('HKEYS', prefix .. 'leases:' .. instance)) do
    tell(gateway, ...)
  end
end
