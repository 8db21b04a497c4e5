-- Requires: prefix, gateways, queue, instances; lease_value, take_ticket, take_lease, ask.
-- Removes everything that a gateway has here. What became free by it is told to the supervisor.
local function forget_gateway(gateway)
  for _, model in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
    local tickets = redis.call('HGETALL', prefix .. 'tickets:' .. model)
    for i = 1, #tickets, 2 do
      if cjson.decode(tickets[i + 1]).gateway == gateway then
        local _, last = take_ticket(model, tickets[i])
        if last then
          ask('verb', 'left', 'model', model)
        end
      end
    end
  end
  for _, instance in ipairs(redis.call('ZRANGE', instances, 0, -1)) do
    local lease = lease_id(redis.call('HGET', prefix .. 'leases:' .. instance, gateway))
    if lease then
      take_lease(instance, gateway, lease)
    end
  end
  redis.call('DEL', prefix .. 'inbox:' .. gateway, prefix .. 'gateway:' .. gateway)
  redis.call('ZREM', gateways, gateway)
end
