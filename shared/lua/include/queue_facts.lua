-- Requires: prefix, queue. Returns the queue in order: {{model, first arrival, {ticket, JSON, …}}, …}.
local function queue_facts()
  local entries = {}
  local flat = redis.call('ZRANGE', queue, 0, -1, 'WITHSCORES')
  for i = 1, #flat, 2 do
    entries[#entries + 1] = { flat[i], flat[i + 1], redis.call('HGETALL', prefix .. 'tickets:' .. flat[i]) }
  end
  return entries
end
