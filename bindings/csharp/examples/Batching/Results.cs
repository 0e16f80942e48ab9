// What a replay came to: each request compared with the recording, and the table of docs/trace.md.
using System;
using System.Globalization;
using System.IO;
using System.Linq;
using System.Runtime.InteropServices;
using Kvrt;

namespace Batching
{
    public sealed class Results
    {
        private sealed class RequestResult
        {
            public ulong Rows, Dropped, Seen, Retained, Rounds, Blocks; // Retained: over layers
            public Checksum Outputs;
            public bool Equal = true;
        }

        private readonly Trace expected;
        private readonly RequestResult[] requests;
        private ulong steps;
        private PoolStats totals;

        public Results(Trace expected)
        {
            this.expected = expected;
            requests = expected.Requests.Select(request => new RequestResult()).ToArray();
        }

        public bool AllEqual => requests.All(result => result.Equal);

        /// <summary>Compares a turn's outputs in a layer.</summary>
        /// <param name="request">Which request.</param>
        /// <param name="turn">Its turn.</param>
        /// <param name="layer">Which layer.</param>
        /// <param name="outputs">Of all rows of the turn: [rows, query_heads, head_dim].</param>
        public void Compare(int request, TraceTurn turn, int layer, ReadOnlySpan<float> outputs)
        {
            RequestResult result = requests[request];
            if (layer == 0)
            {
                result.Rows += turn.Rows;
                result.Dropped += turn.Rows - turn.Accepted;
            }
            ReadOnlySpan<float> recorded = turn.Outputs(layer);
            ReadOnlySpan<float> found = outputs.Slice(outputs.Length - recorded.Length);
            result.Outputs.Add(MemoryMarshal.AsBytes(found));
            for (int i = 0; i < found.Length; ++i)
            {
                result.Equal &= Near(found[i], recorded[i]);
            }
        }

        /// <summary>The kernels of another machine may round otherwise. A NaN is near nothing.
        /// </summary>
        private static bool Near(double found, double recorded)
        {
            return Math.Abs(found - recorded) <= 1e-5 + 1e-5 * Math.Abs(recorded);
        }

        /// <summary>Compares a sequence as its last turn left it.</summary>
        public void Finish(int request, Pool pool, Sequence sequence)
        {
            TraceRequest recorded = expected.Requests[request];
            RequestResult result = requests[request];
            SequenceInfo info = pool.GetInfo(sequence);
            result.Seen = info.Accepted;
            result.Rounds = info.Compactions;
            result.Blocks = info.Blocks;
            result.Equal &= result.Seen == recorded.Seen && result.Rounds == recorded.Rounds;
            for (int layer = 0; layer < recorded.Retained.Length; ++layer)
            {
                ulong retained = pool.GetLayerInfo(sequence, (uint)layer).Retained;
                result.Retained += retained;
                result.Equal &= retained == recorded.Retained[layer];
            }
        }

        public void CountStep()
        {
            ++steps;
        }

        /// <summary>The pool's counters, with all sequences released.</summary>
        public void End(PoolStats stats)
        {
            totals = stats;
        }

        public void Print(TextWriter target)
        {
            target.Write("request prompt  rows dropped  seen retained rounds blocks checksum" +
                         "         outputs\n");
            for (int i = 0; i < requests.Length; ++i)
            {
                RequestResult result = requests[i];
                target.Write(string.Format(
                    CultureInfo.InvariantCulture,
                    "{0,7} {1,6} {2,5} {3,7} {4,5} {5,8} {6,6} {7,6} {8:x16} {9}\n", i,
                    expected.Requests[i].PromptTokens, result.Rows, result.Dropped, result.Seen,
                    result.Retained, result.Rounds, result.Blocks, result.Outputs.Value,
                    result.Equal ? "equal" : "DIFFERENT"));
            }
            target.Write(string.Format(
                CultureInfo.InvariantCulture,
                "steps {0}, tokens {1}, rounds {2}, blocks at most {3}, returned {4}, bytes " +
                "returned {5}\n", steps, totals.TokensAccepted, totals.Compactions,
                totals.PeakLiveBlocks, totals.BlocksReturned, totals.BytesReturned));
        }
    }
}
