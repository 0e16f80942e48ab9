// Makes traces: requests with prompts, drafts and, if wanted, a policy, whose outputs come from
// plain attention in double over the tokens that the policy leaves.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text;

namespace Kvrt.Tests
{
    internal sealed class TraceMaker
    {
        public const uint Layers = 2, Budget = 10, Every = 4, Sinks = 2;

        /// <summary>Rows and accepted rows of each turn, per request.</summary>
        public static readonly uint[][][] Small =
        {
            new uint[][] { new[] { 9u, 9u }, new[] { 1u, 1u }, new[] { 4u, 2u }, new[] { 3u, 0u } },
            new uint[][] { new[] { 16u, 16u }, new[] { 5u, 5u }, new[] { 1u, 1u } },
            new uint[][] { new[] { 2u, 2u }, new[] { 3u, 1u }, new[] { 1u, 1u } }
        };

        private readonly uint[][][] requests;
        private readonly bool hasPolicy;
        private readonly MemoryStream stream = new MemoryStream();
        private readonly BinaryWriter file;

        private TraceMaker(uint[][][] requests, bool hasPolicy)
        {
            this.requests = requests;
            this.hasPolicy = hasPolicy;
            file = new BinaryWriter(stream); // little-endian
        }

        /// <summary>A whole file. With a policy: streaming, 10 tokens with 2 sinks, a round after
        /// every 4 accepted ones.</summary>
        public static byte[] Make(uint[][][] requests, bool hasPolicy)
        {
            var maker = new TraceMaker(requests, hasPolicy);
            maker.WriteHeader();
            for (uint i = 0; i < requests.Length; ++i)
            {
                maker.WriteRequest(i);
            }
            maker.file.Write(0UL);
            byte[] bytes = maker.stream.ToArray();
            Seal(bytes);
            return bytes;
        }

        /// <summary>Sets the checksum: FNV-1a over all before it.</summary>
        public static void Seal(byte[] bytes)
        {
            ulong value = 14695981039346656037;
            for (int i = 0; i < bytes.Length - 8; ++i)
            {
                value = unchecked((value ^ bytes[i]) * 1099511628211);
            }
            BitConverter.GetBytes(value).CopyTo(bytes, bytes.Length - 8);
        }

        private void WriteHeader()
        {
            file.Write(Encoding.ASCII.GetBytes("KVTRACE1"));
            Write(Layers, Engine.QueryHeads, Engine.KvHeads, Engine.Dim);
            Write((uint)StorageFormat.Float32, (uint)RopeStyle.Half, 4);
            Write(hasPolicy ? (uint)Scorer.Streaming : 0, 0, 0, Budget, Every, Sinks, 0, 0);
            Write((uint)requests.Length);
            file.Write(7UL); // seed
            file.Write(1.0);
            file.Write(0.01);
            Write(3, 17);
        }

        private void WriteRequest(uint request)
        {
            uint[][] turns = requests[request];
            var retained = new List<int>();
            uint seen = 0, rounds = 0, sinceRound = 0;
            byte[] body = Body(() =>
            {
                foreach (uint[] turn in turns)
                {
                    WriteTurn(request, seen, turn[0], turn[1], retained);
                    retained.AddRange(Enumerable.Range((int)seen, (int)turn[1]));
                    seen += turn[1];
                    sinceRound += turn[1];
                    if (hasPolicy && sinceRound >= Every && retained.Count > Budget)
                    {
                        retained.RemoveRange((int)Sinks, retained.Count - (int)Budget);
                        ++rounds;
                        sinceRound = 0;
                    }
                }
            });
            Write(turns[0][0], (uint)turns.Length, rounds, seen);
            Write((uint)retained.Count, (uint)retained.Count);
            file.Write(body);
        }

        /// <summary>What is written meanwhile, taken out again.</summary>
        private byte[] Body(Action write)
        {
            long start = stream.Length;
            write();
            byte[] body = stream.ToArray().Skip((int)start).ToArray();
            stream.SetLength(start);
            return body;
        }

        private void WriteTurn(uint text, uint seen, uint rows, uint accepted, List<int> retained)
        {
            uint outputs = Math.Min((rows + 1) / 2, 4);
            Write(rows, accepted, outputs);
            for (uint row = 0; row < rows; ++row)
            {
                Write(1000 + seen + row);
            }
            for (uint layer = 0; layer < Layers; ++layer)
            {
                foreach (uint what in new uint[] { 2, 0, 1 })
                {
                    Engine.Rows(what, text, seen, rows, layer).ToList()
                        .ForEach(value => file.Write(Numbers.ToHalf(value)));
                }
                for (uint row = rows - outputs; row < rows; ++row)
                {
                    int[] tokens = retained.Concat(Enumerable.Range((int)seen, (int)row + 1))
                        .ToArray();
                    WriteOutputs(text, seen + row, layer, tokens);
                }
            }
        }

        private void WriteOutputs(uint text, uint position, uint layer, int[] tokens)
        {
            for (uint head = 0; head < Engine.QueryHeads; ++head)
            {
                uint kvHead = head / 2;
                double[] output = Numbers.Attend(
                    Half(2, text, (int)position, layer, head),
                    token => Half(0, text, token, layer, kvHead),
                    token => Half(1, text, token, layer, kvHead), tokens, out _);
                output.ToList().ForEach(value => file.Write((float)value));
            }
        }

        private static double[] Half(uint what, uint text, int position, uint layer, uint head)
        {
            return Engine.Row(what, text, (ulong)position, layer)
                .Skip((int)(head * Engine.Dim)).Take((int)Engine.Dim)
                .Select(value => Numbers.FromHalf(Numbers.ToHalf(value))).ToArray();
        }

        private void Write(params uint[] values)
        {
            foreach (uint value in values)
            {
                file.Write(value);
            }
        }
    }
}
