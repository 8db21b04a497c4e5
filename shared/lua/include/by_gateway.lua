-- Groups tickets (see waiting) by their gateway. Returns the gateways in order of their oldest ticket, and the
-- ticket ids of each.
local function by_gateway(list)
  local order, ids = {}, {}
  for _, ticket in ipairs(list) do
    local gateway = ticket.value.gateway
    if not ids[gateway] then
      order[#order + 1] = gateway
      ids[gateway] = {}
    end
    table.insert(ids[gateway], ticket.id)
  end
  return order, ids
end
