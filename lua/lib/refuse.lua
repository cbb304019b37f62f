-- Refusals: the only way a transition says no. Nothing that the transition wrote before stays.
-- The client mirrors every code as a class (roq/errors.py).

local M = {}

local codes = {
  FENCED = true, -- the claim or the trainer was superseded
  NOT_READY = true, -- a step out of order
  NO_RUN = true, -- nothing was created under this name
  NO_GROUP = true, -- no such group was ever issued
  NO_WORKER = true, -- no such worker is attached
  NO_WEIGHTS = true, -- the weights version is not registered
  CONFIG = true, -- the run exists with another configuration
  INVALID = true, -- an argument is missing, malformed or out of range
  STATE_LOST = true, -- the caller is ahead of what the server remembers
  ENDED = true, -- the run has ended
  DAMAGED = true, -- the keys of the run hold what no transition writes
}

-- Stop the transition with ROQ_<code> and a sentence that tells the caller what to do.
function M.with(code, message, ...)
  assert(codes[code], code)
  if select("#", ...) > 0 then
    message = string.format(message, ...)
  end
  error({ refusal = "ROQ_" .. code .. " " .. message })
end

-- As `with`, for keys that hold what no transition writes: it says which.
function M.damaged(message, ...)
  M.with(
    "DAMAGED",
    "the run's keys were changed by something else than roq: %s. Nothing was done; restore the run from a backup "
      .. "(roq import)",
    (string.gsub(string.format(message, ...), "%c", " "))
  )
end

return M
