// The program in the README, compiled from there.
using System;
using System.IO;
using System.Linq;
using System.Reflection;

namespace Kvrt.Tests
{
    internal static class ReadmeTests
    {
        /// <summary>The values are 0 to 99 and all weights are the same.</summary>
        [Test]
        public static void TheReadmesProgramRuns()
        {
            string folder = Path.GetDirectoryName(Assembly.GetExecutingAssembly().Location);
            string program = new[] { "Readme.exe", "Readme.dll" }
                .Select(name => Path.Combine(folder, name)).First(File.Exists);
            TextWriter console = Console.Out;
            var output = new StringWriter();
            Console.SetOut(output);
            try
            {
                Assembly.LoadFrom(program).EntryPoint.Invoke(null, new object[0]);
            }
            finally
            {
                Console.SetOut(console);
            }
            Check.Equal("100 tokens, mean 49.50\n", output.ToString(), "output");
        }
    }
}
