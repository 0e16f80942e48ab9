// The median time of a decode step, called from C#: compared with the same program in C, which is
// bench/bindings/overhead.c. Prints
//
//   overhead language=csharp layers=32 sequences=64 median_us=...
//
// A step is begin, append, reserve, a write and an attend per layer, accept, end. The tensors are
// the same in every step, so that nothing but the calls is in the loop.
using System;
using System.Diagnostics;
using System.Globalization;
using System.Linq;
using Kvrt;

namespace Overhead
{
    internal static class Program
    {
        private const uint Layers = 32, Sequences = 64, Heads = 8, KvHeads = 2, Dim = 64;
        private const uint Prompt = 128, PrefillRows = Sequences * Prompt;
        private const int WarmUpSteps = 20, TimedSteps = 200;

        /// <summary>[rows, heads, dim]; a decode step uses the first rows.</summary>
        private static readonly float[] Queries = Filled(Heads), Results = Filled(Heads),
                                        Keys = Filled(KvHeads), Values = Filled(KvHeads);

        private static float[] Filled(uint heads)
        {
            return Enumerable.Range(0, (int)(PrefillRows * heads * Dim))
                .Select(i => (float)Math.Sin(0.01 * i)).ToArray();
        }

        private static Pool CreatePool()
        {
            var layer = new Layer
            {
                QueryHeads = Heads, KvHeads = KvHeads, KeyDim = Dim,
                KeyFormat = StorageFormat.Float16
            };
            var config = new PoolConfig
            {
                ArenaBytes = 1UL << 30, BlockTokens = 16, MaxSequences = Sequences,
                MaxStepTokens = PrefillRows, Threads = 1
            };
            return new Pool(config, new Model(Enumerable.Repeat(layer, (int)Layers)));
        }

        /// <summary>One step that brings counts[i] tokens of sequence i, `rows` in all.</summary>
        private static void RunStep(Pool pool, Sequence[] sequences, uint[] counts, uint rows)
        {
            var stored = new TensorLayout(rows, KvHeads, Dim);
            var asked = new TensorLayout(rows, Heads, Dim);
            ReadOnlyTensor keys = ReadOnlyTensor.Float32(Part(Keys, rows, KvHeads), stored);
            ReadOnlyTensor values = ReadOnlyTensor.Float32(Part(Values, rows, KvHeads), stored);
            ReadOnlyTensor queries = ReadOnlyTensor.Float32(Part(Queries, rows, Heads), asked);
            Tensor results = Tensor.Float32(Part(Results, rows, Heads), asked);
            using (Step step = pool.BeginStep())
            {
                step.AppendBatch(sequences, counts);
                step.Reserve();
                for (uint layer = 0; layer < Layers; ++layer)
                {
                    step.Write(layer, keys, values);
                    step.Attend(layer, queries, results);
                }
                step.AcceptBatch(sequences, counts);
                step.End();
            }
        }

        private static Span<float> Part(float[] data, uint rows, uint heads)
        {
            return data.AsSpan(0, (int)(rows * heads * Dim));
        }

        private static void Main()
        {
            using (Pool pool = CreatePool())
            {
                var sequences = new Sequence[Sequences];
                for (int i = 0; i < sequences.Length; ++i)
                {
                    sequences[i] = pool.CreateSequence();
                }
                uint[] prompts = Enumerable.Repeat(Prompt, sequences.Length).ToArray();
                uint[] ones = Enumerable.Repeat(1u, sequences.Length).ToArray();
                RunStep(pool, sequences, prompts, PrefillRows);
                for (int i = 0; i < WarmUpSteps; ++i)
                {
                    RunStep(pool, sequences, ones, Sequences);
                }
                var times = new double[TimedSteps];
                for (int i = 0; i < TimedSteps; ++i)
                {
                    long start = Stopwatch.GetTimestamp();
                    RunStep(pool, sequences, ones, Sequences);
                    times[i] = (Stopwatch.GetTimestamp() - start) * 1e6 / Stopwatch.Frequency;
                }
                Array.Sort(times);
                double median = (times[TimedSteps / 2 - 1] + times[TimedSteps / 2]) / 2;
                Console.WriteLine(string.Format(
                    CultureInfo.InvariantCulture,
                    "overhead language=csharp layers={0} sequences={1} median_us={2:F1}", Layers,
                    Sequences, median));
            }
        }
    }
}
