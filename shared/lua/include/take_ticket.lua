-- Requires: prefix, queue. Takes one ticket away; the model's last one takes the queue entry along.
-- Returns whether it was there, and whether it was the last.
local function take_ticket(model, ticket)
  local tickets_of_model = prefix .. 'tickets:' .. model
  if redis.call('HDEL', tickets_of_model, ticket) == 0 then
    return false, false
  end
  if redis.call('EXISTS', tickets_of_model) == 1 then
    return true, false
  end
  redis.call('ZREM', queue, model)
  return true, true
end
