-- Registers a gateway or renews it, and brings its leases and tickets here in line with what it really holds.
--
-- Alive is what the gateway names: leases, waiting tickets, and ids of `acquire` calls under way. Since the call was
-- made before this script runs, something booked in between may be alive without being named: only what was booked
-- before the previous beat and is not named is removed.
--
-- KEYS: herd gateways gateway_info inbox queue instances commands
-- ARGV: prefix gateway beat info leases tickets minting batch counts
--   info, leases: JSON objects; tickets: JSON object of lists; minting: JSON list; counts: JSON object, model → object
--   of numbers to add to its record, as batch number `batch`: one that is sent again is added once
-- Returns: {the beat before or 0, herd open, {instance of a lost lease, …}, {missing ticket, …}, last id of the inbox}
-- Emits: nothing; commands: idle, left
-- @include write
-- @include lease_value
-- @include ask
-- @include take_ticket
-- @include take_lease
local previous_beat = redis.call('ZSCORE', gateways, gateway)
local herd_open = redis.call('EXISTS', herd)
redis.call('ZADD', gateways, beat, gateway)
write(gateway_info, cjson.decode(info))
redis.call('PEXPIRE', gateway_info, 600000)
redis.call('PEXPIRE', inbox, 600000)

if batch ~= '0' and redis.call('HGET', gateway_info, 'batch') ~= batch then
  redis.call('HSET', gateway_info, 'batch', batch)
  for model, fields in pairs(cjson.decode(counts)) do
    local record = prefix .. 'model:' .. model
    if redis.call('EXISTS', record) == 1 then
      for name, more in pairs(fields) do
        redis.call('HINCRBY', record, name, more)
      end
    end
  end
end

local live_leases, live_tickets = cjson.decode(leases), cjson.decode(tickets)
local alive = {}
for _, id in ipairs(cjson.decode(minting)) do
  alive[id] = true
end
for _, id in pairs(live_leases) do
  alive[id] = true
end
for _, ids in pairs(live_tickets) do
  for _, id in ipairs(ids) do
    alive[id] = true
    alive[id .. '+'] = true -- the lease of a grant whose message is still unread
  end
end
local function is_stale(id, booked)
  return not alive[id] and booked < tonumber(previous_beat or beat)
end

local lost = {}
for instance, lease in pairs(live_leases) do
  local state = redis.call('HGET', prefix .. 'instance:' .. instance, 'state')
  if not state or state == 'stopping' or state == 'stop_failed' then
    if herd_open == 1 then
      lost[#lost + 1] = instance
    end
  else
    local leases_of_instance = prefix .. 'leases:' .. instance
    local current = redis.call('HGET', leases_of_instance, gateway)
    if not current or is_stale(lease_id(current), lease_beat(current)) then
      redis.call('HSET', leases_of_instance, gateway, lease .. ':' .. beat)
    end
  end
end
for _, instance in ipairs(redis.call('ZRANGE', instances, 0, -1)) do
  local current = redis.call('HGET', prefix .. 'leases:' .. instance, gateway)
  if current and is_stale(lease_id(current), lease_beat(current)) then
    take_lease(instance, gateway, lease_id(current))
  end
end

local missing = {}
for model, ids in pairs(live_tickets) do
  for _, id in ipairs(ids) do
    local ticket = redis.call('HGET', prefix .. 'tickets:' .. model, id)
    if ticket then
      -- Nobody looks at tickets of a model that has no place in the queue.
      redis.call('ZADD', queue, 'LT', cjson.decode(ticket).enqueued_ms, model)
    elseif herd_open == 1 then
      missing[#missing + 1] = id
    end
  end
end
for _, model in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
  local flat = redis.call('HGETALL', prefix .. 'tickets:' .. model)
  for i = 1, #flat, 2 do
    if not alive[flat[i]] then
      local ticket = cjson.decode(flat[i + 1])
      if ticket.gateway == gateway and is_stale(flat[i], ticket.beat) then
        local _, last = take_ticket(model, flat[i])
        if last then
          ask('verb', 'left', 'model', model)
        end
      end
    end
  end
end

local newest = redis.call('XREVRANGE', inbox, '+', '-', 'COUNT', 1)[1]
return { tonumber(previous_beat or 0), herd_open, lost, missing, newest and newest[1] or '0-0' }
