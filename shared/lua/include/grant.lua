-- Requires: prefix, gateways, queue; waiting, by_gateway, tell. Turns a model's waiting tickets into leases on an
-- instance: one lease and one message for each gateway, however many of its tickets wait. The lease is written over
-- whatever the gateway had there, so that a release under way for the older id changes nothing. Its id differs from
-- every ticket's, so that giving back one of the tickets can't take the claim from the others. Tickets of gateways
-- that are not registered are dropped. Returns how many tickets were granted.
local function grant(instance, model)
  local record = prefix .. 'instance:' .. instance
  local facts = redis.call('HMGET', record, 'address', 'nonce', 'state_revision', 'load_ms')
  local order, ids = by_gateway(waiting(model))
  local granted = 0
  for _, gateway in ipairs(order) do
    local beat = redis.call('ZSCORE', gateways, gateway)
    if beat then
      local lease = ids[gateway][1] .. '+'
      redis.call('HSET', prefix .. 'leases:' .. instance, gateway, lease .. ':' .. beat)
      tell(gateway, 'type', 'granted', 'model', model, 'instance', instance, 'address', facts[1] or '',
        'nonce', facts[2] or '', 'state_revision', facts[3] or 0, 'load_ms', facts[4] or 0,
        'lease', lease, 'tickets', table.concat(ids[gateway], ','))
      granted = granted + #ids[gateway]
    end
  end
  redis.call('DEL', prefix .. 'tickets:' .. model)
  redis.call('ZREM', queue, model)
  return granted
end
