-- Settles tickets of a model with a refusal, once each.
--
-- KEYS: leader gateways queue
-- ARGV: prefix token model error only
--   error: JSON object, passed on; only: JSON list of ticket ids, or empty for all
-- Returns: how many were settled, or {STALE_LEADER}
-- Emits: nothing; inboxes: failed
-- @include fence
-- @include tell
-- @include take_ticket
-- @include waiting
-- @include by_gateway
local tickets = waiting(model)
if only ~= '' then
  local chosen = {}
  for _, id in ipairs(cjson.decode(only)) do
    chosen[id] = true
  end
  local rest = tickets
  tickets = {}
  for _, ticket in ipairs(rest) do
    if chosen[ticket.id] then
      tickets[#tickets + 1] = ticket
    end
  end
end
for _, ticket in ipairs(tickets) do
  take_ticket(model, ticket.id)
end
local order, ids = by_gateway(tickets)
for _, gateway in ipairs(order) do
  if redis.call('ZSCORE', gateways, gateway) then
    tell(gateway, 'type', 'failed', 'model', model, 'tickets', table.concat(ids[gateway], ','), 'error', error)
  end
end
return #tickets
