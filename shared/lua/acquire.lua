-- Claims a model's READY instance (for a peek a SLEEPING one too), or enrols a ticket for it. One script, so that there is no instant between
-- looking at the state and holding the claim.
--
-- KEYS: herd gateways model_key queue tickets_key commands events
-- ARGV: prefix model ticket gateway kind deadline_ms not_instance first_arrival_ms request_id may
--   deadline_ms counts from now; not_instance may be empty; first_arrival_ms is 0 for a new ticket;
--   may: load, wake (a sleeper, no more) or wait (for what others have loaded or woken)
-- Returns: {instance, address, nonce, state revision}, or the ticket's first arrival (ms),
--   or {NO_HERD}, {UNREGISTERED}, {UNKNOWN_MODEL}, {NOT_LOADED}, {QUEUE_FULL, setting, limit}
-- Emits: queued (a new queue entry); commands: demand, refused (not_instance is what serves now)
-- @include now_ms
-- @include emit
-- @include ask
-- @include take_ticket
-- @include inference_waiting
if redis.call('EXISTS', herd) == 0 then
  return { NO_HERD }
end
local beat = redis.call('ZSCORE', gateways, gateway)
if not beat then
  return { UNREGISTERED }
end
local instance, removed, name = unpack(redis.call('HMGET', model_key, 'instance', 'removed', 'name'))
if not name or removed == '1' then
  return { UNKNOWN_MODEL }
end

local comes = may == 'load'
if instance and instance ~= '' and instance ~= not_instance then
  local record = prefix .. 'instance:' .. instance
  local state, address, nonce, revision =
    unpack(redis.call('HMGET', record, 'state', 'address', 'nonce', 'state_revision'))
  local on_its_way = state == 'starting' or state == 'loading' or state == 'waking' or state == 'recovering'
  comes = comes or on_its_way or (state == 'sleeping' and may == 'wake')
  if state == 'ready' or (state == 'sleeping' and kind == 'peek') then
    redis.call('HSET', prefix .. 'leases:' .. instance, gateway, ticket .. ':' .. beat)
    take_ticket(model, ticket) -- enrolled by an earlier call whose answer was lost
    return { instance, address, nonce, revision }
  end
elseif instance and instance ~= '' then
  ask('verb', 'refused', 'instance', instance)
end

local enrolled = redis.call('HGET', tickets_key, ticket)
if enrolled then
  ask('verb', 'demand', 'model', model)
  return cjson.decode(enrolled).enqueued_ms
end
if not comes then
  return { NOT_LOADED }
end

if kind == 'inference' then
  local limit, limit_total = unpack(redis.call('HMGET', herd, 'queue_limit', 'queue_limit_total'))
  limit, limit_total = tonumber(limit or 0), tonumber(limit_total or 0)
  -- Tickets of all kinds are counted first, which is quick; looking into them is for when that is not enough.
  if limit > 0 and redis.call('HLEN', tickets_key) >= limit and inference_waiting(model) >= limit then
    return { QUEUE_FULL, 'queue_limit', tostring(limit) }
  end
  local tickets, waiting, others = 0, 0, redis.call('ZRANGE', queue, 0, -1)
  for _, other in ipairs(others) do
    tickets = tickets + redis.call('HLEN', prefix .. 'tickets:' .. other)
  end
  if limit_total > 0 and tickets >= limit_total then
    for _, other in ipairs(others) do
      waiting = waiting + inference_waiting(other)
    end
    if waiting >= limit_total then
      return { QUEUE_FULL, 'queue_limit_total', tostring(limit_total) }
    end
  end
end

local first = tonumber(first_arrival_ms)
if first == 0 or first > now_ms then
  first = now_ms
end
redis.call('HSET', tickets_key, ticket, string.format(
  '{"gateway":%s,"kind":%s,"request_id":%s,"enqueued_ms":%.0f,"deadline_ms":%.0f,"beat":%s}',
  cjson.encode(gateway), cjson.encode(kind), cjson.encode(request_id), first, now_ms + deadline_ms, beat))
if redis.call('ZADD', queue, 'LT', first, model) == 1 then
  emit('queued', nil, 'model', model, 'request_id', request_id)
end
ask('verb', 'demand', 'model', model)
return first
