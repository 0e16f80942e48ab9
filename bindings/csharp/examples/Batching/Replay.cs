// An engine with continuous batching, whose model is a trace: prompts, decode tokens and drafts of
// several requests in one step, as many requests at once as there are slots.
using System;
using System.Collections.Generic;
using System.Linq;
using Kvrt;

namespace Batching
{
    public sealed class Limits
    {
        /// <summary>Requests that run at once.</summary>
        public uint Slots { get; set; } = 3;

        /// <summary>For keys and values, in MiB.</summary>
        public uint ArenaMiB { get; set; } = 8;

        /// <summary>Of the library.</summary>
        public uint Threads { get; set; } = 1;
    }

    public sealed class Replay : IDisposable
    {
        /// <summary>A request with a slot.</summary>
        private sealed class RunningRequest
        {
            public int Index { get; set; }
            public Sequence Sequence { get; set; }
            public int NextTurn { get; set; }
        }

        private readonly Trace trace;
        private readonly Results results;
        private readonly Pool pool;
        private readonly List<RunningRequest> running = new List<RunningRequest>(); // oldest first
        private int waiting; // the next request to get a slot

        // Of one step; as long as the pool's limits, so that nothing is allocated while it runs.
        private readonly Sequence[] sequences;
        private readonly uint[] counts, accepted, tokenIds;
        private readonly ushort[] queries, keys, values; // half precision: [rows, heads, head_dim]
        private readonly float[] outputs;

        public Replay(Trace trace, Limits limits, Results results)
        {
            this.trace = trace;
            this.results = results;
            uint slots = Math.Min(limits.Slots, (uint)trace.Requests.Count);
            uint mostRows = trace.Requests.Max(request => request.Turns.Max(turn => turn.Rows));
            uint stepTokens = slots * mostRows;
            pool = new Pool(new PoolConfig
            {
                ArenaBytes = (ulong)limits.ArenaMiB << 20,
                BlockTokens = 16,
                MaxSequences = slots,
                MaxTokensPerSequence = (uint)trace.Requests.Max(
                    request => request.Turns.Sum(turn => turn.Rows)),
                MaxStepTokens = stepTokens,
                Threads = limits.Threads
            }, Describe(trace));
            sequences = new Sequence[slots];
            counts = new uint[slots];
            accepted = new uint[slots];
            tokenIds = new uint[stepTokens];
            queries = new ushort[(long)stepTokens * trace.QuerySize];
            keys = new ushort[(long)stepTokens * trace.KvSize];
            values = new ushort[(long)stepTokens * trace.KvSize];
            outputs = new float[(long)stepTokens * trace.QuerySize];
        }

        private static Model Describe(Trace trace)
        {
            var layer = new Layer
            {
                QueryHeads = trace.QueryHeads,
                KvHeads = trace.KvHeads,
                KeyDim = trace.HeadDim,
                KeyFormat = trace.Format
            };
            if (trace.RopeStyle != RopeStyle.None)
            {
                layer.Rope = new Rope
                {
                    Style = trace.RopeStyle,
                    Dimensions = 2 * (uint)trace.InverseFrequencies.Length,
                    InverseFrequencies = trace.InverseFrequencies
                };
            }
            return new Model(Enumerable.Repeat(layer, trace.LayerNumbers.Length));
        }

        public void Dispose()
        {
            pool.Dispose();
        }

        /// <summary>Until all requests are done.</summary>
        public void Run()
        {
            while (waiting < trace.Requests.Count || running.Count != 0)
            {
                Admit();
                RunStep();
                Retire();
            }
            results.End(pool.GetStats());
        }

        /// <summary>Gives free slots to waiting requests.</summary>
        private void Admit()
        {
            for (; running.Count < sequences.Length && waiting < trace.Requests.Count; ++waiting)
            {
                if (trace.Policy != null)
                {
                    trace.Policy.PromptTokens = trace.Requests[waiting].PromptTokens;
                }
                running.Add(new RunningRequest
                {
                    Index = waiting,
                    Sequence = pool.CreateSequence(trace.Policy)
                });
            }
        }

        /// <summary>One forward pass over the next turn of every running request.</summary>
        private void RunStep()
        {
            using (Step step = pool.BeginStep())
            {
                int tokens = Gather();
                int items = running.Count;
                step.AppendBatch(sequences.AsSpan(0, items), counts.AsSpan(0, items),
                                 tokenIds.AsSpan(0, tokens));
                items = Reserve(step, items);
                for (int layer = 0; layer < trace.LayerNumbers.Length; ++layer)
                {
                    RunLayer(step, layer, items);
                }
                step.AcceptBatch(sequences.AsSpan(0, items), accepted.AsSpan(0, items));
                step.End();
                for (int item = 0; item < items; ++item)
                {
                    ++running[item].NextTurn;
                }
                results.CountStep();
            }
        }

        private TraceTurn TurnOf(RunningRequest request)
        {
            return trace.Requests[request.Index].Turns[request.NextTurn];
        }

        /// <summary>Lists the turns, and returns how many tokens they have.</summary>
        private int Gather()
        {
            int tokens = 0;
            for (int item = 0; item < running.Count; ++item)
            {
                TraceTurn turn = TurnOf(running[item]);
                sequences[item] = running[item].Sequence;
                counts[item] = turn.Rows;
                accepted[item] = turn.Accepted;
                turn.TokenIds.CopyTo(tokenIds.AsSpan(tokens));
                tokens += (int)turn.Rows;
            }
            return tokens;
        }

        /// <summary>Where blocks are short, the youngest wait for a later step: older ones will
        /// return theirs. Returns how many stay.</summary>
        private int Reserve(Step step, int items)
        {
            while (items > 1)
            {
                if (step.TryReserve(out _))
                {
                    return items;
                }
                step.Remove(sequences[--items]);
            }
            step.Reserve(); // one alone must fit
            return items;
        }

        private void RunLayer(Step step, int layer, int items)
        {
            int rows = Compute(layer, items);
            var stored = new TensorLayout((uint)rows, trace.KvHeads, trace.HeadDim);
            var asked = new TensorLayout((uint)rows, trace.QueryHeads, trace.HeadDim);
            int querySize = rows * trace.QuerySize, kvSize = rows * trace.KvSize;
            step.Write((uint)layer, ReadOnlyTensor.Float16(keys.AsSpan(0, kvSize), stored),
                       ReadOnlyTensor.Float16(values.AsSpan(0, kvSize), stored));
            step.Attend((uint)layer, ReadOnlyTensor.Float16(queries.AsSpan(0, querySize), asked),
                        Tensor.Float32(outputs.AsSpan(0, querySize), asked));
            int first = 0;
            for (int item = 0; item < items; ++item)
            {
                TraceTurn turn = TurnOf(running[item]);
                int size = (int)turn.Rows * trace.QuerySize;
                results.Compare(running[item].Index, turn, layer, outputs.AsSpan(first, size));
                first += size;
            }
        }

        /// <summary>Here an engine computes. The rows of the sequences follow each other; returns
        /// how many there are.</summary>
        private int Compute(int layer, int items)
        {
            int rows = 0;
            for (int item = 0; item < items; ++item)
            {
                TraceTurn turn = TurnOf(running[item]);
                turn.Queries(layer).CopyTo(queries.AsSpan(rows * trace.QuerySize));
                turn.Keys(layer).CopyTo(keys.AsSpan(rows * trace.KvSize));
                turn.Values(layer).CopyTo(values.AsSpan(rows * trace.KvSize));
                rows += (int)turn.Rows;
            }
            return rows;
        }

        /// <summary>Ends the sequences whose turns are done; the others keep their order.</summary>
        private void Retire()
        {
            for (int item = 0; item < running.Count;)
            {
                RunningRequest request = running[item];
                if (request.NextTurn < trace.Requests[request.Index].Turns.Count)
                {
                    ++item;
                    continue;
                }
                results.Finish(request.Index, pool, request.Sequence);
                pool.ReleaseSequence(request.Sequence);
                running.RemoveAt(item);
            }
        }
    }
}
