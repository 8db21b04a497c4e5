-- Takes a ticket out of the queue, or undoes the lease that an `acquire` of unknown outcome booked under its id.
--
-- KEYS: queue model_key commands
-- ARGV: prefix model ticket gateway
-- Returns: 1 when there was a ticket or a lease of that id, else 0
-- Emits: nothing; commands: left (the model's last ticket), idle (the instance's last lease)
-- @include lease_value
-- @include ask
-- @include take_ticket
-- @include take_lease
local taken, last = take_ticket(model, ticket)
if last then
  ask('verb', 'left', 'model', model)
end
local instance = redis.call('HGET', model_key, 'instance')
if not taken and instance and instance ~= '' then
  taken = take_lease(instance, gateway, ticket)
end
return taken and 1 or 0
