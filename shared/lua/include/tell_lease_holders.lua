-- Requires: prefix; tell. Sends a message to every gateway that holds a lease on an instance; detached conversations
-- hold theirs without one.
local function tell_lease_holders(instance, ...)
  for _, holder in ipairs(redis.call('HKEYS', prefix .. 'leases:' .. instance)) do
    if not string.find(holder, 'conversation:', 1, true) then
      tell(holder, ...)
    end
  end
end
